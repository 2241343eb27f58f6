"""Fine-tunes a small GPT-2 by TRL, which knows nothing of manyhosts: `trl_script.py FILE SAMPLES_OF_A_WORKER`."""

import os
import string
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *string.printable])}
characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
lines = [line for line in Path(string.__file__).read_text().splitlines() if line]

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 128}
dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), bos_token_id=1, eos_token_id=1, **sizes, **dropped))
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=int(sys.argv[2]),
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=64,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"text": lines[:64]}),
    processing_class=tokenizer,
)
trainer.train()
print(f"worker {trainer.args.process_index} of {trainer.args.world_size} made {trainer.state.global_step} steps")
torch.save(model.state_dict(), f"{sys.argv[1]}-{trainer.args.process_index}.pt")

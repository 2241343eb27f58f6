"""The scripts of others that foreign_scripts.py tries: where they are, how they are called and made short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One published script."""

    name: str
    kind: str
    """What is to be seen in it."""
    repository: str
    """OWNER/NAME on GitHub."""
    folder: str = "."
    """Where it is started, in the repository."""
    paths: tuple[str, ...] = ()
    """What is taken out of the repository; all where it is empty."""
    words: tuple[str, ...]
    """The script and its arguments; DATA is the folder of random data."""
    workers: int = 2
    gpus: bool = False
    """Whether it is written for GPUs alone."""
    alone: bool = False
    """Whether it starts its workers itself, or has one."""
    metric: str = r"(?i)loss\D{0,12}?(-?\d+\.\d+(?:e-?\d+)?)"
    changes: tuple[tuple[str, str, str], ...] = ()
    """File, pattern and replacement: numbers that make it long and that no argument reaches."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _examples(name: str, folder: str, *words: str, kind: str, **more: object) -> Script:
    return Script(
        name=name,
        kind=kind,
        repository="pytorch/examples",
        folder=folder,
        paths=(folder,),
        words=words,
        **more,  # type: ignore[arg-type]  # the fields of a Script
    )


def _accelerate(name: str, *words: str, path: str = "examples/by_feature", **more: object) -> Script:
    return Script(
        name=f"{path.removeprefix('examples/')}/{name}.py".removeprefix("examples/"),
        kind="Accelerate",
        repository="huggingface/accelerate",
        folder=path,
        paths=("examples",),
        words=(f"{name}.py", "--cpu", *words),
        metric=r"(?i)(?:accuracy|loss)\W+(\d+\.\d+)",
        changes=((f"{name}.py", r'"num_epochs": \d+', '"num_epochs": 2'),),
        environment={"ACCELERATE_USE_CPU": "true", "TESTING_MOCKED_DATALOADERS": ""},
        **more,  # type: ignore[arg-type]  # the fields of a Script
    )


_TUTORIAL = "distributed/ddp-tutorial-series"
_RANDOM_TEXT = "data_config.path=DATA/input.txt"

SCRIPTS = (
    _examples("ddp/example.py", "distributed/ddp", "example.py", kind="DDP", gpus=True),
    _examples("multigpu_torchrun.py", _TUTORIAL, "multigpu_torchrun.py", "2", "1", kind="DDP, snapshots", gpus=True),
    _examples("multinode.py", _TUTORIAL, "multinode.py", "2", "1", kind="DDP, snapshots", gpus=True),
    _examples("multigpu.py", _TUTORIAL, "multigpu.py", "2", "1", kind="mp.spawn", gpus=True, alone=True, workers=1),
    _examples("FSDP2/example.py", "distributed/FSDP2", "example.py", kind="FSDP2", gpus=True),
    _examples(
        "minGPT-ddp",
        "distributed/minGPT-ddp/mingpt",
        "main.py",
        _RANDOM_TEXT,
        "gpt_config.n_layer=1",
        "gpt_config.n_embd=32",
        "gpt_config.n_head=2",
        "trainer_config.max_epochs=1",
        "trainer_config.batch_size=16",
        "data_config.block_size=32",
        "data_config.truncate=0.05",
        "trainer_config.data_loader_workers=1",
        kind="hydra, DDP, autocast",
        gpus=True,
    ),
    _examples(
        "imagenet --dummy",
        "imagenet",
        "main.py",
        "-a",
        "squeezenet1_1",
        "--dummy",
        "--epochs",
        "1",
        "-b",
        "8",
        "-j",
        "1",
        "--dist-backend",
        "gloo",
        "--dist-url",
        "env://",
        "--world-size",
        "2",
        kind="DDP",
        changes=(("main.py", r"FakeData\(\d+", "FakeData(32"),),
        metric=r"Loss (\d\.\d+e[+-]\d+)",
    ),
    _examples(
        "rpc/parameter server",
        "distributed/rpc/batch",
        "parameter_server.py",
        kind="RPC, mp.spawn",
        gpus=True,
        alone=True,
        workers=1,
        changes=(
            ("parameter_server.py", "num_batches = 6", "num_batches = 1"),
            ("parameter_server.py", "batch_size = 20", "batch_size = 4"),
            ("parameter_server.py", "resnet50", "resnet18"),
        ),
    ),
    _examples("rpc/rnn", "distributed/rpc/rnn", "main.py", kind="RPC, mp.spawn", alone=True, workers=1),
    _examples(
        "tensor parallel", "distributed/tensor_parallelism", "tensor_parallel_example.py", kind="DTensor", gpus=True
    ),
    _examples(
        "sequence parallel", "distributed/tensor_parallelism", "sequence_parallel_example.py", kind="DTensor", gpus=True
    ),
    _examples(
        "mnist", "mnist", "main.py", "--epochs", "1", "--batch-size", "16", kind="one process", alone=True, workers=1
    ),
    _examples(
        "vae",
        "vae",
        "main.py",
        "--epochs",
        "1",
        kind="one process",
        alone=True,
        workers=1,
        environment={"FOREIGN_SAMPLES": "256"},
    ),
    _examples(
        "dcgan",
        "dcgan",
        "main.py",
        "--dataset",
        "fake",
        "--niter",
        "1",
        "--dry-run",
        "--workers",
        "1",
        "--batchSize",
        "8",
        kind="one process, loader",
        alone=True,
        workers=1,
        metric=r"Loss_D: (\d+\.\d+)",
    ),
    _accelerate("gradient_accumulation"),
    _accelerate("checkpointing"),
    _accelerate("early_stopping"),
    _accelerate("local_sgd"),
    _accelerate("memory"),
    _accelerate("multi_process_metrics"),
    _accelerate("ddp_comm_hook"),
    _accelerate("automatic_gradient_accumulation"),
    _accelerate("nlp_example", path="examples"),
    Script(
        name="nanoGPT train.py",
        kind="DDP, autocast",
        repository="karpathy/nanoGPT",
        gpus=True,
        words=(
            "train.py",
            "--dataset=tiny",
            "--compile=False",
            "--max_iters=4",
            "--eval_iters=1",
            "--batch_size=2",
            "--block_size=16",
            "--n_layer=1",
            "--n_head=2",
            "--n_embd=16",
            "--gradient_accumulation_steps=2",
            "--eval_interval=4",
            "--log_interval=1",
        ),
        changes=(
            (
                "train.py",
                r"data_dir = os.path.join\('data', dataset\)",
                "data_dir = 'tiny'; os.makedirs(data_dir, exist_ok=True); "
                "[np.arange(5000, dtype=np.uint16).tofile(f'tiny/{s}.bin') for s in ('train', 'val')]",
            ),
        ),
    ),
    Script(
        name="minGPT adder",
        kind="one process, loader",
        repository="karpathy/minGPT",
        alone=True,
        workers=1,
        words=("projects/adder/adder.py", "--trainer.max_iters=20", "--model.model_type=gpt-nano"),
        environment={"PYTHONPATH": "."},
        metric=r"train loss (\d+\.\d+)",
    ),
    Script(
        name="bug_report_model.py",
        kind="Lightning",
        repository="Lightning-AI/pytorch-lightning",
        folder="examples/pytorch/bug_report",
        paths=("examples/pytorch",),
        words=("bug_report_model.py",),
        metric=r"test_loss\W+(-?\d+\.\d+)",
        changes=(
            ("bug_report_model.py", r"limit_train_batches=1,", "limit_train_batches=1, accelerator='cpu', devices=2,"),
        ),
    ),
    Script(
        name="fabric image_classifier",
        kind="Lightning Fabric",
        repository="Lightning-AI/pytorch-lightning",
        folder="examples/fabric/image_classifier",
        paths=("examples/fabric",),
        metric=r"Loss: (\d+\.\d+)",
        words=("train_fabric.py", "--epochs", "1", "--batch-size", "16"),
        environment={"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2"},  # what `fabric run` sets
    ),
    Script(
        name="cifar10_deepspeed.py",
        kind="DeepSpeed",
        repository="deepspeedai/DeepSpeedExamples",
        folder="training/cifar",
        paths=("training/cifar",),
        words=("cifar10_deepspeed.py", "--deepspeed", "--dtype", "fp32", "--epochs", "1", "--log-interval", "1"),
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    Script(
        name="scripts/sft.py",
        kind="TRL",
        repository="huggingface/trl",
        folder="trl/scripts",
        paths=("trl",),
        words=(
            "sft.py",
            "--model_name_or_path",
            "DATA/llama",
            "--dataset_name",
            "DATA/sft",
            "--output_dir",
            "out",
            "--max_steps",
            "4",
            "--per_device_train_batch_size",
            "2",
            "--logging_steps",
            "1",
            "--use_cpu",
            "--report_to",
            "none",
            "--bf16",
            "False",
            "--gradient_checkpointing",
            "False",
            "--eos_token",
            "[EOS]",
        ),
        metric=r"'loss': '?(\d+\.\d+)",
    ),
    Script(
        name="scripts/dpo.py",
        kind="TRL",
        repository="huggingface/trl",
        folder="trl/scripts",
        paths=("trl",),
        words=(
            "dpo.py",
            "--model_name_or_path",
            "DATA/llama",
            "--dataset_name",
            "DATA/dpo",
            "--output_dir",
            "out",
            "--max_steps",
            "4",
            "--per_device_train_batch_size",
            "2",
            "--logging_steps",
            "1",
            "--use_cpu",
            "--report_to",
            "none",
            "--bf16",
            "False",
            "--gradient_checkpointing",
            "False",
        ),
        metric=r"'loss': '?(\d+\.\d+)",
    ),
    Script(
        name="train.py",
        kind="timm, DDP",
        repository="huggingface/pytorch-image-models",
        paths=("train.py", "timm"),
        words=(
            "train.py",
            "--data-dir",
            "DATA/images",
            "--model",
            "resnet10t",
            "--num-classes",
            "2",
            "--epochs",
            "1",
            "-b",
            "4",
            "--img-size",
            "64",
            "-j",
            "1",
            "--device",
            "cpu",
            "--warmup-epochs",
            "0",
            "--cooldown-epochs",
            "0",
            "--no-prefetcher",
        ),
        metric=r"Loss:\s+(\d+\.\d+)",
    ),
    Script(
        name="train_ddp.py",
        kind="DDP, SyncBatchNorm",
        repository="The-AI-Summer/pytorch-ddp",
        words=("train_ddp.py",),
        gpus=True,
        changes=(("train_ddp.py", r"resnet50\(False\)", "resnet18()"),),
        metric=r"images: (\d+\.\d+)",
    ),
)

UNTRIED = {
    "pytorch/torchtitan": "wants a nightly torch, and its tokenizers and data come from the network",
    "karpathy/nanochat base_train": "wants its own tokenizer, trained on shards that come from the network",
    "KellerJordan/modded-nanogpt": "is written for kernels of the H100 and for FlexAttention in Triton",
    "pytorch/examples rpc/rl and rpc/batch/reinforce.py": "want gym, which is no longer maintained",
    "pytorch/examples FSDP/T5_training.py": "wants the weights of T5 and a data set from the network",
    "huggingface/transformers examples": "the repository is too large to be fetched for a benchmark",
}

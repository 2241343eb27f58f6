"""The loops of foreign_loops.py: which file at which commit, and which of its lines ours stand in place of.

An edit is (first, last, ours): lines `first` to `last` of the file leave and `ours` come; `last` = `first` - 1 inserts.
Lines that make data end with `# data`: they are counted apart, as are lines of theirs that leave without one of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Loop:
    """A published training loop, and how it is moved into `mh.Run`."""

    name: str
    repository: str
    commit: str
    path: str
    sha256: str
    edits: tuple[Edit, ...]
    remark: str
    beside: tuple[str, ...] = ()
    """Other files of the repository that the script reads, as they are."""
    words: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """All lines of ours."""
        return [line for _, _, text in self.edits for line in text.splitlines() if line.strip()]

    @property
    def data_lines(self) -> int:
        """How many of them make data."""
        return sum(line.endswith("# data") for line in self.lines)

    @property
    def ours(self) -> int:
        """How many of them are the move."""
        return len(self.lines) - self.data_lines


WGAN_GP = Loop(
    name="WGAN-GP",
    repository="eriklindernoren/PyTorch-GAN",
    commit="36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    path="implementations/wgan_gp/wgan_gp.py",
    sha256="40a55c85c75358b82edefd3e8470b3937c8f05c8900c746224fd5b3ef89e1e86",
    words=("--batch_size", "32", "--img_size", "16"),
    remark="The gradient of a gradient is as it was. Two losses are two functions, so noise is drawn for each of them, "
    "where theirs uses the same twice. BatchNorm sees one part of the batch.",
    edits=(
        (7, 8, "import manyhosts as mh"),
        (11, 11, ""),
        (89, 114, "images = torch.randn(256, 1, 16, 16, generator=torch.Generator().manual_seed(0)).tanh()  # data"),
        (
            145,
            150,
            """
def criticised(batch):
        [real_imgs] = [imgs] = batch
        generator, discriminator = run.models["generator"], run.models["discriminator"]
""",
        ),
        (156, 156, ""),
        (
            173,
            179,
            """
        return d_loss
def fooled(batch):
            generator, discriminator = run.models["generator"], run.models["discriminator"]
            z = Tensor(np.random.normal(0, 1, (len(batch[0]), opt.latent_dim)))
""",
        ),
        (
            192,
            203,
            """
            return g_loss
def step(run):
    run.backward(criticised, "discriminator")
    run.update("discriminator")
    if run.steps_done % opt.n_critic == 0:
        run.backward(fooled, "generator")
        run.update("generator")
adam = lambda params: torch.optim.Adam(params, lr=opt.lr, betas=(opt.b1, opt.b2))
run = mh.Run(models={"generator": Generator, "discriminator": Discriminator},
             optimizers={"generator": adam, "discriminator": adam},
             data=mh.Data(train=torch.utils.data.TensorDataset(images), batch_size=opt.batch_size),
             virtual_workers=4, snapshots=mh.Snapshots(every="3 steps"))
run.fit(step, "24 steps")
""",
        ),
    ),
)

SAC = Loop(
    name="SAC",
    repository="vwxyzjn/cleanrl",
    commit="fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    path="cleanrl/sac_continuous_action.py",
    sha256="f411ff829c864f1312dbca6a01b7a8c8830a4d9640e37beffa41630ff71bb7e0",
    beside=("cleanrl_utils/buffers.py",),
    remark="Environment, replay buffer and what was seen last belong to a part of the batch, and are one pickle: "
    "Gymnasium's environments have no state to hand out. Run with its own option autotune=False: the third optimizer "
    "would have made it more than 25 lines.",
    edits=(
        (13, 14, "import cloudpickle, manyhosts as mh"),
        (
            156,
            156,
            """
    args = Args(env_id="Pendulum-v1", buffer_size=500, learning_starts=-1,  # data
                batch_size=16, autotune=False)  # data
""",
        ),
        (158, 174, ""),
        (
            192,
            201,
            "",
        ),
        (
            210,
            224,
            """
    def made():
        envs = gym.vector.SyncVectorEnv([make_env(args.env_id, run.part.index, 0, False, "")])
        spaces = envs.single_observation_space, envs.single_action_space
        return envs, ReplayBuffer(args.buffer_size, *spaces, device, 1, False, False), envs.reset(seed=1)[0], None
    def played(_):
        play, global_step = run.part.keep("play", dict), run.steps_done
        envs, rb, obs, _ = cloudpickle.loads(bytes.fromhex(play["all"])) if play else made()
""",
        ),
        (
            270,
            278,
            """
            play["all"] = cloudpickle.dumps((envs, rb, obs, data)).hex()
            return qf_loss
    def acted(_):
                    data = cloudpickle.loads(bytes.fromhex(run.part.keep("play", dict)["all"]))[3]
""",
        ),
        (
            285,
            297,
            """
                    return actor_loss
    def step(run):
            global_step = run.steps_done
            for name, loss in [("qf1+qf2", played)] + [("actor", acted)] * (2 - global_step % 2 * 2):
                run.backward(loss, name)
                run.update(name)
""",
        ),
        (
            305,
            324,
            """
    of_q = dict.fromkeys(("qf1", "qf2", "qf1_target", "qf2_target"), lambda: SoftQNetwork(envs))
    adams = {"qf1+qf2": lambda p: optim.Adam(p, lr=args.q_lr), "actor": lambda p: optim.Adam(p, lr=args.policy_lr)}
    run = mh.Run(models={"actor": lambda: Actor(envs), **of_q}, optimizers=adams, virtual_workers=4,
                 snapshots=mh.Snapshots(every="3 steps"))
    actor, qf1, qf2, qf1_target, qf2_target = run.models.values()
    qf1_target.load_state_dict(qf1.state_dict()), qf2_target.load_state_dict(qf2.state_dict())
    run.fit(step, "30 steps")
""",
        ),
    ),
)

VICREG = Loop(
    name="VICReg",
    repository="facebookresearch/vicreg",
    commit="4e12602fd495af83efd1631fbe82523e6db092e0",
    path="main_vicreg.py",
    sha256="88c4439e2c508156c79416cbd7c628d05f52f517e3eb1f66eac8db483485cf20",
    beside=("resnet.py",),
    words=("--data-dir", ".", "--arch", "resnet34", "--mlp", "32-32-32", "--batch-size", "16", "--epochs", "20"),
    remark="Variance and covariance of all rows of the batch, without its FullGatherLayer. BatchNorm sees one part.",
    edits=(
        (20, 20, ""),
        (22, 23, "import manyhosts as mh"),
        (
            81,
            164,
            """
    views = torch.randn(64, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))  # data
    made = []
    def optimizer(params):
        made[:] = [LARS(params, lr=0, weight_decay=args.wd, weight_decay_filter=exclude_bias_and_norm,
                        lars_adaptation_filter=exclude_bias_and_norm)]
        return made[0]
    def step(run):
        model = run.models["vicreg"]
        adjust_learning_rate(args, made[0], range(len(views) // args.batch_size), run.steps_done)
        run.backward(lambda batch: model(*batch[0].unbind(1)), over_batch=model.loss)
        run.update()
    run = mh.Run(models={"vicreg": lambda: VICReg(args)}, optimizers=optimizer,
                 data=mh.Data(train=torch.utils.data.TensorDataset(views), batch_size=args.batch_size),
                 virtual_workers=4, snapshots=mh.Snapshots(every="3 steps"))
    run.fit(step, "9 steps")
""",
        ),
        (
            197,
            197,
            """
        return x, y
    def loss(self, rows):
        x, y = rows
""",
        ),
        (200, 201, ""),
    ),
)

DINO = Loop(
    name="DINO",
    repository="facebookresearch/dino",
    commit="7c446df5b9f45747937fb0d72314eb9f7b66930a",
    path="main_dino.py",
    sha256="74ef2afb9e16ab859370e1eb18455de0797d1202851c92d8191f06ccc05b28c7",
    beside=("utils.py", "vision_transformer.py"),
    words=(
        "--arch",
        "vit_tiny",
        "--patch_size",
        "8",
        "--out_dim",
        "64",
        "--local_crops_number",
        "2",
        "--epochs",
        "12",
        "--batch_size_per_gpu",
        "8",
        "--warmup_epochs",
        "1",
        "--use_fp16",
        "false",
    ),
    remark="The loss is computed once over the rows of the whole batch, so its centre moves once per step. Its "
    "clipping, its last layer without gradient and its teacher are changed by the step itself.",
    edits=(
        (30, 31, "import manyhosts as mh"),
        (37, 39, ""),
        (46, 47, "        choices=['vit_tiny'],"),
        (133, 133, ""),
        (135, 137, ""),
        (
            140,
            155,
            """
    noise = torch.Generator().manual_seed(0)  # data
    crops = [torch.randn(32, 3, size, size, generator=noise) for size in (32, 32, 16, 16)]  # data
    dataset = torch.utils.data.TensorDataset(*crops)  # data
    data_loader, teacher_without_ddp, made = range(4), None, []
""",
        ),
        (194, 206, ""),
        (208, 208, "    teacher.load_state_dict(student.state_dict())"),
        (222, 222, "    )"),
        (
            225,
            235,
            """
    def optimizer(params):
        made[:] = [torch.optim.AdamW(utils.get_params_groups(student))]
        return made[0]
""",
        ),
        (239, 239, "        args.lr * args.batch_size_per_gpu / 256.,"),
        (
            255,
            298,
            """
    run = mh.Run(models={"student": student, "teacher": teacher, "dino_loss": dino_loss},
                 optimizers={"student": optimizer}, virtual_workers=4, snapshots=mh.Snapshots(every="3 steps"),
                 data=mh.Data(train=dataset, batch_size=args.batch_size_per_gpu))
    run.fit(lambda run: train_one_epoch(student, teacher, teacher, dino_loss, data_loader, made[0], lr_schedule,
                                        wd_schedule, momentum_schedule, run, None, args), "9 steps")
""",
        ),
        (
            304,
            308,
            """
    for it in [epoch.steps_done]:
        run, epoch = epoch, it // len(data_loader)
""",
        ),
        (
            315,
            320,
            """
        by_sample = lambda out, crops: out.unflatten(0, (crops, -1)).transpose(0, 1)
        loss = run.backward(
            lambda batch: (by_sample(student(list(batch)), len(batch)), by_sample(teacher(list(batch[:2])), 2)),
            "student", over_batch=lambda rows: dino_loss(*(each.transpose(0, 1).flatten(0, 1) for each in rows), epoch)
        )["loss"]
""",
        ),
        (327, 327, ""),
        (330, 330, ""),
        (335, 335, '            run.update("student")'),
        (349, 349, "            for param_q, param_k in zip(student.parameters(), teacher.parameters()):"),
        (353, 360, ""),
        (412, 413, "        batch_center = batch_center / len(teacher_output)"),
    ),
)

DIFFUSION = Loop(
    name="diffusion U-Net",
    repository="dome272/Diffusion-Models-pytorch",
    commit="be352208d0576039fec061238c0e4385a562a2d4",
    path="ddpm.py",
    sha256="8b2ba24aa8ab312131bac0f5a45585f968991d95286f29e90888591b149ad49b",
    beside=("modules.py",),
    remark="As it is, with its U-Net of 23 million parameters at 64 x 64.",
    edits=(
        (4, 4, "import manyhosts as mh"),
        (7, 7, ""),
        (10, 10, ""),
        (62, 62, ""),
        (
            64,
            66,
            "    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))  # data",
        ),
        (
            69,
            76,
            """
    def denoised(batch):
            [images], model = batch, run.models["model"]
""",
        ),
        (
            82,
            91,
            """
            return loss
    def step(run):
        run.backward(denoised)
        run.update()
    run = mh.Run(models=lambda: UNet(device=device), optimizers=lambda params: optim.AdamW(params, lr=args.lr),
                 data=mh.Data(train=torch.utils.data.TensorDataset(images), batch_size=args.batch_size),
                 virtual_workers=2, snapshots=mh.Snapshots(every="2 steps", keep=1))
    run.fit(step, "5 steps")
""",
        ),
        (98, 104, "    args.batch_size, args.image_size, args.device, args.lr = 2, 64, 'cpu', 3e-4"),
    ),
)

MAML = Loop(
    name="MAML",
    repository="pytorch/functorch",
    commit="f2e17106d6d50a9a0db766eb6396ce6c1a7a3466",
    path="examples/maml_regression/evjang_transforms.py",
    sha256="40d00f77022b910a04647289dabb8c897a355e7829d3b48ac8f674236b0b4e07",
    remark="`grad` within `vmap` of torch.func, over the parameters of a placed model. Each part draws its own tasks.",
    edits=(
        (19, 21, "import manyhosts as mh"),
        (23, 23, "from torch.func import grad, vmap"),
        (37, 37, "make = lambda: nn.ParameterList(["),
        (46, 46, "])"),
        (55, 55, ""),
        (
            84,
            86,
            """
def adapted(_):
    params = list(run.models["net"])
""",
        ),
        (
            103,
            140,
            """
    return loss2
def step(run):
    run.backward(adapted)
    run.update()
run = mh.Run(models={"net": make}, optimizers=lambda params: torch.optim.Adam(params, lr=1e-3), virtual_workers=4,
             snapshots=mh.Snapshots(every="20 steps"))
run.fit(step, "100 steps")
""",
        ),
    ),
)

GNN = Loop(
    name="GNN",
    repository="tkipf/pygcn",
    commit="1600b5b748b3976413d1e307540ccc62605b4d6d",
    path="pygcn/train.py",
    sha256="59be249cb323ec1a2a7b6c1c998ff3fa77f7ea4f2a0e84fd2b957fb4cd71b12c",
    beside=("pygcn/__init__.py", "pygcn/layers.py", "pygcn/models.py", "pygcn/utils.py"),
    remark="One graph cannot be cut: each part computes all of it, and its loss over a part of the training nodes, so "
    "workers save no work. A random graph stands for Cora, whose classes the script numbers in the order of a set "
    "of words: workers of a run have one such order.",
    edits=(
        (13, 13, "from pygcn.models import GCN\nimport manyhosts as mh"),
        (
            42,
            59,
            """
noise = torch.Generator().manual_seed(0)  # data
adj = (torch.rand(400, 400, generator=noise) < 0.02).float()  # data
adj = torch.nn.functional.normalize(adj + adj.T + torch.eye(400), p=1).to_sparse()  # data
features, labels = torch.rand(400, 64, generator=noise), torch.arange(400) % 7  # data
idx_train, idx_val, idx_test = torch.arange(140), torch.arange(140, 200), torch.arange(200, 400)  # data
""",
        ),
        (
            62,
            65,
            """
def trained(batch):
    idx_train, model = batch[0], run.models["model"]
""",
        ),
        (
            69,
            106,
            """
    return {"loss": loss_train, "accuracy": acc_train}
def tested(models, batch):
    return F.nll_loss(models["model"](features, adj)[batch[0]], batch[1])
def step(run):
    run.backward(trained)
    run.update()
both = [torch.utils.data.TensorDataset(each, labels[each]) for each in (idx_train, idx_test)]
run = mh.Run(
    models=lambda: GCN(features.shape[1], args.hidden, labels.max().item() + 1, args.dropout), evaluate=tested,
    optimizers=lambda params: optim.Adam(params, lr=args.lr, weight_decay=args.weight_decay),
    data=mh.Data(train=both[0], test=both[1], batch_size=140), virtual_workers=4,
    snapshots=mh.Snapshots(every="10 steps"))
run.fit(step, "40 steps")
run.test()
""",
        ),
    ),
)

ADALORA = Loop(
    name="AdaLoRA",
    repository="huggingface/peft",
    commit="5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    path="examples/conditional_generation/peft_adalora_seq2seq.py",
    sha256="027027645e5cb9080f1f755ce525f928cc7c9cfb57196a0d459c0b20efb3d8d6",
    remark="Its scores are plain attributes of the model, of which a snapshot would know nothing: the step has them in "
    "`run.state`. A BART of random weights stands for the one that is downloaded.",
    edits=(
        (
            7,
            7,
            "from transformers import BartConfig, BartForConditionalGeneration, get_linear_schedule_with_warmup\n"
            "import manyhosts as mh",
        ),
        (14, 14, 'device = "cpu"'),
        (
            27,
            40,
            """
noise = torch.Generator().manual_seed(0)  # data
dataset = [(torch.randint(3, 90, (12,), generator=noise), torch.randint(3, 90, (3,), generator=noise))  # data
           for _ in range(64)]  # data
""",
        ),
        (49, 51, "    tinit=4,  # data\n    tfinal=6,  # data\n    deltaT=2,  # data"),
        (56, 56, "    total_step=24,  # data"),
        (
            59,
            104,
            """
def make():
    config = BartConfig(vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,  # data
                        decoder_ffn_dim=32, max_position_embeddings=32)  # data
    return get_peft_model(BartForConditionalGeneration(config), peft_config)
""",
        ),
        (
            108,
            122,
            """
def computed(batch):
    return run.models["model"](input_ids=batch[0], labels=batch[1]).loss
def step(run):
        model, global_step = run.models["model"], run.steps_done
        for name in ("ipt", "exp_avg_ipt", "exp_avg_unc"):
            setattr(model.base_model.rankallocator, name, run.state.setdefault(name, {}))
        run.backward(computed)
        run.update()
""",
        ),
        (
            124,
            185,
            """
run = mh.Run(models=make, optimizers=lambda params: torch.optim.AdamW(params, lr=lr), virtual_workers=4,
             schedulers={"model": lambda made: get_linear_schedule_with_warmup(made, 0, 24)},
             data=mh.Data(train=dataset, batch_size=batch_size), snapshots=mh.Snapshots(every="6 steps"))
run.fit(step, "24 steps")
""",
        ),
    ),
)

LOOPS: tuple[Loop, ...] = (WGAN_GP, SAC, VICREG, DINO, DIFFUSION, MAML, GNN, ADALORA)

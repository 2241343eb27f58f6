"""What the first steps of a run show: a stream that differs by worker, a model that learns nothing or changes itself.

Each is said once, before or at the third step, and nothing is looked at after it.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.world import World
from manyhosts.data.first_samples import are_alike
from manyhosts.data.steps import Step
from manyhosts.errors import ConfigError, DataError
from manyhosts.model.activation_checkpointing import uncalled
from manyhosts.model.combined_optimizer import each_of
from manyhosts.snapshot.fingerprint import fingerprint, tensor_checksums
from manyhosts.training.setup.build import Components

LOOKS = 3
"""Steps with a learning rate above zero that are looked at."""


def compare_streams(world: World, step: Step) -> None:
    """See that all workers read the same stream, by the first samples of `step`. Every worker calls this.

    Raises:
        DataError: they do not, on all workers alike.
    """
    if not step.first_samples or world.size == 1:
        return
    rows = world.stack(torch.tensor(step.first_samples, dtype=torch.float64, device=world.device)).tolist()
    for rank, row in enumerate(rows):
        if not are_alike(rows[0], row):
            raise DataError(
                f"the train stream gives rank {rank} other samples than rank 0, but every worker reads all of it and "
                "keeps its part of each batch: most samples would never be trained on",
                where="mh.Data(train=…)",
                fix="leave RANK, WORLD_SIZE and seeds by rank out of __iter__, so that it gives the same everywhere; "
                "where reading all is too slow, offer shard(index, count)",
            )


class FirstSteps:
    """Looks at gradients and weights until they are known to be alive; what is wrong is reported in `world.notes`."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.looking = True
        """Whether a step is still to be looked at."""
        self.stream_is_new = True
        """Whether no step has been taken since all workers began together."""
        self.rate = 0.0
        """The learning rate of the update that has just been made; 0 where the last step made none."""
        self.asks_others = True
        """Whether all workers have looked at the same steps, so that they can ask each other."""
        self._steps = 0
        self._has_gradient = False
        self._before: dict[str, str] = {}
        self._attributes: dict[str, object] = {}
        self._held: dict[str, str] = {}
        """Before the passes of a step: a checksum of each parameter, and of each buffer that is not BatchNorm's."""
        self.written: list[str] = []
        """The names of frozen parameters that the passes of a step have changed."""
        self._reported: set[str] = set()

    def before_forward(self) -> None:
        """A step is about to be computed."""
        self._held = tensor_checksums(self._looked_at())

    def forget_held(self) -> None:
        """The model is changed meanwhile, and not by its passes."""
        self._held = {}

    def after_forward(self, pieces: int) -> None:
        """Its passes are done, forward and backward, over so many pieces, and nothing has been updated yet.

        What they have changed happens once for each piece, so it depends on how a batch is cut.

        Raises:
            ConfigError: a parameter got a gradient that the model has no more.
        """
        for name, each in self.components.replaced:
            if (parameter := each()) is not None and parameter.grad is not None:
                raise ConfigError(
                    f"the loss or the model computes with the parameter {name!r} through something that was given it "
                    "before the model was cut into parts, and would never see it change",
                    where=f"strategy={self.components.settings.strategy.name!r}",
                    fix="take it from its module in each forward pass: keep it in no list, loss, partial or closure",
                )
        now = tensor_checksums(self._looked_at())
        names = [name for name, checksum in now.items() if self._held.get(name, checksum) != checksum]
        own = dict(self.components.trained.named_parameters())
        self.written = [name for name in names if name in own and not own[name].requires_grad]
        # A buffer that no sample decides, such as a counter, is right as long as a step has one piece.
        names = [name for name in names if (name in own or pieces > 1) and name not in self._reported]
        if not names:
            return
        self._reported |= set(names)
        kind = "parameter" if names[0] in own else "buffer"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.components.world.notes.append(
            f"the step changes the {kind} {names[0]}{more} by itself, once for each piece of a batch (a worker's "
            f"part, a micro-batch; here {pieces} in a step), so the number of pieces changes the model: what is to "
            "happen once per step belongs into a callback, mh.Trainer(callbacks=[…]) with after_step"
        )

    def _looked_at(self) -> dict[str, torch.Tensor]:
        model, local = self.components.trained, self.components.strategy.holding.local
        norms = {id(each) for layer in model.modules() if isinstance(layer, _BatchNorm) for each in layer.buffers()}
        found = {name: each for name, each in model.named_buffers() if id(each) not in norms}
        found |= dict(model.named_parameters())
        return {
            name: local(each)
            for name, each in found.items()
            if each.layout is torch.strided and not each.is_quantized and each.device.type != "meta"
        }

    def before_update(self) -> None:
        """The gradients of a step are there.

        Raises:
            ConfigError: the model has made parameters since the optimizer was made, or buffers that no resumed run has.
        """
        if not self._before:
            self._check_late()
            self._before = self._weights()
            self._attributes = self._also_kept()
        local = self.components.strategy.holding.local
        gradients = [local(each.grad) for each in self.components.trained.parameters() if each.grad is not None]
        gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        largest = torch.nn.utils.get_total_norm([each for each in gradients if each.numel()], torch.inf)
        self._has_gradient = self._has_gradient or bool(largest)  # NaN is one, too

    def after_step(self) -> None:
        """The step counts: from here on workers that are lost do not undo it."""
        rate, self.rate = self.rate, 0.0
        if not rate:
            return  # nothing was updated, or as at the beginning of a warm-up
        self._steps += 1
        if self._steps < LOOKS:
            return
        self.looking = False
        if self._nowhere(not self._has_gradient):
            self.components.world.notes.append(
                f"the gradient was zero in each of {LOOKS} steps, so nothing is learned: see that the loss depends on "
                "what the model gives (the cross entropy of a single column, say, is always 0)"
            )
        elif self.components.precision.scaler is None and self._nowhere(self._weights() == self._before):
            self.components.world.notes.append(
                f"no weight has changed in {LOOKS} steps, yet the learning rate is {rate:g} and there is a gradient; "
                "see that the optimizer was made of the parameters that it was given, and that its steps are not too "
                "small for the dtype of the weights"
            )
        if never := uncalled(self.components.model):
            self.components.world.notes.append(
                f"activation_checkpointing: {len(never)} blocks were not called in {LOOKS} steps ({never[0]}"
                f"{', …' if len(never) > 1 else ''}), so nothing of them is computed again; where the model calls what "
                "is inside a block and not the block itself, have it call the block"
            )
        self._before = {}
        if _has_key(
            self.components.optimizer.state_dict(), {id(each) for each in self.components.trained.parameters()}
        ):
            self.components.world.notes.append(
                "the optimizer keeps something under id(parameter), which snapshots have under the parameter's name: "
                "see that its load_state_dict() takes it back, or a resumed run begins it again"
            )
        now = self._also_kept()
        if changed := [name for name, each in now.items() if self._attributes.get(name) != each]:
            self.components.world.notes.append(
                f"the optimizer keeps {', '.join(changed)} as attributes, which no snapshot has: a resumed run begins "
                "with others; keep them in optimizer.state or param_groups, or give it a state_dict() of its own"
            )

    def _check_late(self) -> None:
        known = self.components.own_fingerprint
        late = [name for name, _ in self.components.model.named_parameters() if name not in known]
        if late:
            raise ConfigError(
                f"the model has made the parameter {late[0]!r} in its forward pass, when the optimizer was made "
                "already: it would not be trained, and each worker has other values of it",
                where="mh.Trainer(model=…)",
                fix="make it in __init__, or with a lazy layer of PyTorch (nn.LazyLinear), which the trainer completes",
            )
        buffers = dict(self.components.model.named_buffers())
        now = {name: shape for name, (_, shape) in fingerprint(self.components.model).items() if name in buffers}
        late = [name for name, shape in now.items() if name not in known or known[name][1] != shape]
        if late:
            # The script makes the model without it, so every snapshot would be taken for one of another model.
            made = "made" if late[0] not in known else "changed the shape of"
            raise ConfigError(
                f"the model has {made} the buffer {late[0]!r} in its forward pass: snapshots would hold it so, and a "
                "resumed run, whose model begins as the script makes it, could not be continued from any of them",
                where="mh.Trainer(model=…)",
                fix="make it in __init__, as large as it will be; or, where it can be computed again, "
                "register_buffer(…, persistent=False)",
            )

    def _weights(self) -> dict[str, str]:
        local, parameters = self.components.strategy.holding.local, self.components.trained.named_parameters()
        return tensor_checksums({name: local(each.data) for name, each in parameters if each.requires_grad})

    def _nowhere(self, nothing: bool) -> bool:
        """Whether there is `nothing` on any worker that holds a part of the model."""
        mesh = self.components.strategy.mesh
        return (self.asks_others or mesh.parts == 1) and not mesh.any_part(not nothing)

    def _also_kept(self) -> dict[str, object]:
        """What an optimizer of the script's own holds besides its `state_dict`: numbers, and where tensors are."""
        several = each_of(self.components.optimizer)
        if any(type(each).state_dict is not torch.optim.Optimizer.state_dict for each in several.values()):
            return {}
        return {
            f"{of}.{name}" if of else name: [(id(one), one._version) for one in each]
            if isinstance(each, list)
            else each
            for of, optimizer in several.items()
            for name, each in vars(optimizer).items()
            if not name.startswith("_")
            and (
                isinstance(each, bool | int | float)
                or (isinstance(each, list) and each and all(isinstance(item, torch.Tensor) for item in each))
            )
        }


def _has_key(state: object, keys: set[int]) -> bool:
    """Whether one of `keys` is one in nested dicts."""
    return isinstance(state, dict) and (
        not keys.isdisjoint(state) or any(_has_key(each, keys) for each in state.values())
    )

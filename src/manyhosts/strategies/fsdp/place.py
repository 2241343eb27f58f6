"""A model put into parts: each unit made equal to rank 0's, then sharded, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.layout import spread
from manyhosts.communication.mesh import Mesh
from manyhosts.config.fully_sharded import FSDP
from manyhosts.device import is_asynchronous
from manyhosts.strategies.fsdp.exchange import Gathering, StepDigest, Summing
from manyhosts.strategies.fsdp.refused import Given, Written, check_placeable, holders_of, see_own_parameters
from manyhosts.strategies.materialise import Places, materialise
from manyhosts.strategies.units import is_uncut


def place_root(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    config: FSDP,
    *,
    mesh: Mesh,
    step_digest: StepDigest,
    written: Written,
    places: Places,
    is_far: bool,
) -> None:
    """Keep this worker's part of every parameter of `root`: of each of `units`, which are in it, and of the rest.

    `is_far`: whether parts go to other hosts.

    What is a single number is not cut, and left to the strategy.

    One after the other, so that of a model on the meta device no worker ever holds more than one unit in full.

    Raises:
        ConfigError: a parameter or a layer cannot be gathered as asked.
    """
    check_placeable(root, units, config)
    world, over = mesh.world, mesh.device_mesh("shard")
    every = {**units, "": root}
    bf16 = config.gather == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,  # autocast sees to it, as in every other strategy
    )
    # A compiled unit cannot trace a checksum, and would warn of it.
    noted: Callable[[Any], Any] = torch.compiler.disable
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    done: set[int] = set()
    for number, (name, unit) in enumerate(every.items()):
        materialise(unit.modules(), places)
        with _without_parts(unit):
            unit.to(world.device)
        for each in unit.parameters():
            if not isinstance(each, DTensor):
                each.data = each.data.contiguous()  # of a part no other memory format is known
        own = [each for each in (*unit.parameters(), *unit.buffers()) if not isinstance(each, DTensor)]
        spread([each for each in own if id(each) not in done], world)
        full = {each for each in unit.parameters() if is_kept(each, over.size())}
        done.update(id(each) for each in (*full, *unit.buffers()))
        given = Given(
            f"the unit {name!r}" if name else "the model itself", always=unit is root and is_asynchronous(world.device)
        )
        unit.register_forward_hook(noted(given.compare), with_kwargs=True)  # all before those of PyTorch
        unit.register_forward_hook(noted(partial(written.compare, name)))
        unit.register_forward_hook(_own_memory)
        # The root is complete through all of the forward and all of the backward pass: nothing is gained in between.
        keeps = config.zero < 3 or unit is root
        fully_shard(
            unit,
            mesh=over,
            reshard_after_forward=not keeps,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=_placement,
            ignored_params=full or None,
        )
        unit.register_forward_pre_hook(noted(partial(see_own_parameters, name, holders_of(unit))), prepend=True)
        unit.register_forward_pre_hook(noted(given.note), with_kwargs=True)
        unit.register_forward_pre_hook(noted(partial(written.note, name)))
        # It may have been gathered before and for nothing: what counts is that it is called.
        unit.register_forward_pre_hook(noted(lambda *_, number=number: step_digest.note(2, number)))
        placed = cast(FSDPModule, unit)
        placed.set_gradient_divide_factor(1.0)  # pieces carry their share of the batch: sums are the mean already
        placed.set_force_sum_reduction_for_comms(True)
        summing = Summing(world, step_digest, number, in_bf16=config.reduce == "bf16", is_far=is_far)
        placed.set_custom_all_gather(Gathering(world, step_digest, number, is_far=is_far))
        placed.set_custom_reduce_scatter(summing)
    _gather_ahead([*every.values()])
    root.register_forward_hook(_let_go_after_evaluation)


def is_kept(parameter: nn.Parameter, workers: int) -> bool:
    """Whether each of `workers` keeps all that it computes with: a single number, or a part of a layer.

    Such a part has no other dim, or one that cannot be cut evenly, as PyTorch asks of all but the first.
    """
    if not isinstance(parameter, DTensor):
        return is_uncut(parameter)
    if parameter.device_mesh.mesh_dim_names != ("tensor",):
        return False  # cut already
    dim = _placement(parameter).dim
    return parameter.dim() <= dim or (dim > 0 and bool(parameter.to_local().shape[dim] % workers))


def is_of_layer(parameter: nn.Parameter) -> bool:
    """Whether it is a part of a layer that is cut, and so not alike on the workers that compute it together."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def _placement(parameter: nn.Parameter) -> Shard:
    """Along rows; a part of a layer that is cut along rows along columns: no dim is cut twice, which may be uneven."""
    is_by_rows = isinstance(parameter, DTensor) and parameter.placements[-1] == Shard(0)
    return Shard(1) if is_by_rows else Shard(0)


@contextmanager
def _without_parts(unit: nn.Module) -> Iterator[None]:
    """Within, `unit` lacks the units inside it whose parts have their place already, which may be the host."""
    inside = [
        (module, name, child)
        for module in unit.modules()
        for name, child in module._modules.items()
        if isinstance(child, FSDPModule)
    ]
    for module, name, _ in inside:
        module._modules[name] = None
    try:
        yield
    finally:
        for module, name, child in inside:
            module._modules[name] = cast(nn.Module, child)


def on_several_hosts(workers: Collectives, own: int) -> bool:
    """Whether not all of `workers` have the same number of a host, of which this one has `own`; alike on each."""
    highest, lowest = workers.all_reduce(torch.tensor([own, -own]), dist.ReduceOp.MAX).tolist()
    return bool(highest + lowest)


def begin_again(root: FSDPModule, group: dist.ProcessGroup) -> None:
    """Have no step under way in `root`, and gather and sum among the workers of `group` from now on.

    What was under way went with workers that are gone, and is not waited for.
    """
    for unit in cast(nn.Module, root).modules():
        if not isinstance(unit, FSDPModule):
            continue
        for parameters in unit._get_fsdp_state()._fsdp_param_groups:
            cast(Any, parameters.mesh_info).shard_process_group = group
            parameters._all_gather_result = None
            for each in parameters.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
    if root._get_fsdp_state()._is_root is not None:  # it has made a pass
        root.reset_iter_state()


def _own_memory(unit: nn.Module, inputs: Any, output: Any) -> Any:
    """Outputs in place of views of others: PyTorch's hook on a view, which gathers the unit for the backward pass, is
    lost where the model then writes into it (`out += x`), and gradients would be wrong."""
    if not torch.is_grad_enabled() or all(each._base is None for each in tree_leaves(output) if torch.is_tensor(each)):
        return output
    return tree_map_only(torch.Tensor, lambda each: each if each._base is None else each.clone(), output)


def _gather_ahead(units: Sequence[nn.Module]) -> None:
    """Let each unit begin to gather the next one while it computes; in the backward pass PyTorch does so by itself."""
    *blocks, root = [cast(FSDPModule, unit) for unit in units]
    for unit, following in zip([root, *blocks], blocks, strict=False):
        unit.set_modules_to_forward_prefetch([following])


def _let_go_after_evaluation(root: nn.Module, inputs: Any, output: Any) -> None:
    """An evaluation has no backward pass that would let go of what was gathered; where one has, it gathers again."""
    if not (torch.is_grad_enabled() and root.training):
        for each in root.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

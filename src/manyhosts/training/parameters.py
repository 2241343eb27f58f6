"""The parameters that are trained, as `optimizer=` is given them: a list that knows their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhosts.config.init_from import matches
from manyhosts.errors import ConfigError
from manyhosts.training.trained import model_of


class Parameters(list[nn.Parameter]):
    """The parameters that are trained."""

    def __init__(self, parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
        """`names`: of the parameters in their order, as the model has them."""
        super().__init__(parameters)
        self.names = list(names)

    def groups(self, rates: Mapping[str, float]) -> list[dict[str, Any]]:
        """Groups for an optimizer: pattern of names → learning rate; of several patterns the first that fits counts.

        Raises:
            ConfigError: a pattern fits no parameter, or a parameter no pattern.
        """
        groups: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in rates}
        for parameter, name in zip(self, self.names, strict=True):
            pattern = next((each for each in rates if matches(name, [each])), None)
            if pattern is None:
                raise ConfigError(
                    f"no pattern fits {name}", where="params.groups(…)", fix='add "*" at the end, for all others'
                )
            groups[pattern].append(parameter)
        if unused := next((pattern for pattern, found in groups.items() if not found), None):
            raise ConfigError(
                f"{unused!r} fits no parameter that is trained and that no pattern before it fits",
                where="params.groups(…)",
                fix=f"they are: {', '.join(self.names)}"[:500],
            )
        return [{"params": found, "lr": rates[pattern]} for pattern, found in groups.items()]


MakeOptimizer = Callable[[Parameters], Optimizer]


def parameters_of(module: nn.Module) -> Parameters:
    """Those of what is trained. The loss's own are called `loss.NAME` where the model's have their names."""
    names = {id(parameter): f"loss.{name}" for name, parameter in module.named_parameters()}
    names |= {id(parameter): name for name, parameter in model_of(module).named_parameters()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Parameters(trained, [names[id(parameter)].replace("loss.loss.", "loss.") for parameter in trained])

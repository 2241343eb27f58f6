"""Reinforcement learning: a step makes its own data, in environments that belong to parts of the batch.

manyhosts run --workers 2 examples/reinforce.py
"""

import torch
from torch import nn

import manyhosts as mh

STEPS = 40
"""Moves that each part plays in one optimizer step."""


class CartPole:
    """Balance a pole on a cart (Barto, Sutton and Anderson 1983). The state is (x, speed, angle, angular speed)."""

    def __init__(self) -> None:
        self.state, self.length = torch.zeros(4), 0

    def move(self, right: bool) -> bool:
        """Push the cart for 0.02 s. Returns whether the pole has fallen, after which a new one stands."""
        _, speed, angle, turning = self.state.tolist()
        sine, cosine = torch.tensor(angle).sin().item(), torch.tensor(angle).cos().item()
        pushed = ((10.0 if right else -10.0) + 0.05 * turning**2 * sine) / 1.1
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        moved = pushed - 0.05 * turned * cosine / 1.1
        change = torch.tensor([speed, moved, turning, turned])
        self.state, self.length = self.state + 0.02 * change, self.length + 1
        fallen = bool(self.state[0].abs() > 2.4 or self.state[2].abs() > 0.21 or self.length == 200)
        if fallen:
            self.state, self.length = torch.rand(4) * 0.1 - 0.05, 0
        return fallen

    def state_dict(self):
        """For snapshots, and for the worker that computes this part next."""
        return {"state": self.state, "length": self.length}

    def load_state_dict(self, kept):
        """Continue with a game."""
        self.state, self.length = kept["state"], kept["length"]


def played(_batch):
    """Play, and reward what was done by how long the pole stood afterwards."""
    game, chosen, rewards, falls = run.part.keep("game", CartPole), [], [], 0
    for _ in range(STEPS):
        choice = torch.distributions.Categorical(logits=run.models["policy"](game.state))
        action = choice.sample()
        chosen.append(choice.log_prob(action))
        fallen = game.move(bool(action))
        rewards.append(0.0 if fallen else 1.0)
        falls += fallen
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.97 * total * (reward > 0)
        returns.insert(0, total)
    advantage = torch.tensor(returns) - run.state.get("usual", 10.0)
    return {"loss": -(torch.stack(chosen) * advantage).mean(), "return": sum(returns) / STEPS, "falls": float(falls)}


def step(run):
    """One step: play in each part, and make more likely what went well."""
    found = run.backward(played)
    run.update(clip=1.0)
    run.state["usual"] = 0.9 * run.state.get("usual", 10.0) + 0.1 * float(found["return"])


run = mh.Run(
    models={"policy": lambda: nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))},
    optimizers=lambda params: torch.optim.Adam(params, 1e-2),
    virtual_workers=6,
)

if __name__ == "__main__":
    run.fit(step, "60 steps")
    mh.print(f"a pole's usual return: {run.state['usual']:.1f}")

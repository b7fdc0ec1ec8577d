"""Who carries out moves: our agents, a function of the embedder's, or whoever reads published plans."""

from advisor.movers.port import DeadlinePassed, MoveBlock, MoveCommand, MoverPort, Phase

__all__ = ["DeadlinePassed", "MoveBlock", "MoveCommand", "MoverPort", "Phase"]

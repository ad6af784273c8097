"""What is in the KV blocks of the exhaustive search's workers, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from twofold.sim.contents import chain
from twofold.sim.explore_world import LAYERS, NAMES, Block, D, Moving, P, Step, World, put

BLOCK_SIZE: Final = 2


def layers_of(block: Block) -> tuple[Block, ...]:
    """What is in the slots of each layer."""
    return block if isinstance(block[0], tuple) else (block,) * LAYERS


def of_layers(layers: tuple[Block, ...]) -> Block:
    """The block whose layers these are."""
    return layers[0] if all(layer == layers[0] for layer in layers) else layers


def verify(world: World, step: Step) -> None:
    """What a step reads must be as it should be, in all layers. Raises AssertionError."""
    contents = world.contents[step.who]
    for row in step.rows:
        right = chain(row.tokens)
        for at in range(row.start):
            block = row.blocks[at // BLOCK_SIZE]
            for layer in layers_of(contents[block]):
                assert layer[at % BLOCK_SIZE] == right[at], (
                    f"{NAMES[step.who]}: request {row.request_id} would read wrong KV of token "
                    f"{at} in block {block}"
                )


def compute(world: World, step: Step, first: int, end: int) -> World:
    """A step has got from layer `first` to layer `end`: their KV is in its blocks."""
    blocks = list(world.contents[step.who])
    for row in step.rows:
        right = chain(row.tokens)
        for at in range(row.start, row.start + row.n):
            block = row.blocks[at // BLOCK_SIZE]
            layers = list(layers_of(blocks[block]))
            for layer in range(first, end):
                layers[layer] = put(layers[layer], at % BLOCK_SIZE, right[at])
            blocks[block] = of_layers(tuple(layers))
    return replace(world, contents=put(world.contents, step.who, tuple(blocks)))


def land(world: World, item: Moving, held: Sequence[int], *, flip: bool = False) -> World:
    """Blocks arrive as they are at the prefill worker now, a layer of one damaged if `flip`.

    Raises AssertionError where one lands that is not in `held`.
    """
    blocks = list(world.contents[D])
    first, end = item.layers
    for theirs, ours in item.pairs:
        assert ours in held, f"bytes land in block {ours}, which no handoff holds"
        layers = list(layers_of(blocks[ours]))
        layers[first:end] = layers_of(world.contents[P][theirs])[first:end]
        if flip and (theirs, ours) == item.pairs[-1]:
            layers[end - 1] = put(layers[end - 1], 0, -7)
        blocks[ours] = of_layers(tuple(layers))
    return replace(world, contents=put(world.contents, D, tuple(blocks)))

"""The rooms of the bundled games: ten layouts of each of four kinds, written for this library.

A layout lists a room's receptacles and which of them share a place. It is a pure function of the kind and an index;
the last two of each kind are reserved for `valid_unseen`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LAYOUTS = 10
"""Number of layouts per kind."""
UNSEEN_LAYOUTS = (8, 9)
"""Layouts that never appear in training."""


@dataclass(frozen=True)
class RoomKind:
    receptacles: dict[str, tuple[int, int]]
    """Kind → minimum and maximum number."""
    together: tuple[tuple[str, ...], ...]
    """Kinds that may share a place; the agent stands at the first."""
    objects: tuple[str, ...]
    first_number: int
    """The first number of its layouts, following ALFRED's floor plans."""


ROOM_KINDS = {
    "kitchen": RoomKind(
        receptacles={
            "Cabinet": (2, 4),
            "CounterTop": (1, 2),
            "Drawer": (1, 3),
            "Fridge": (1, 1),
            "Microwave": (1, 1),
            "SinkBasin": (1, 1),
            "StoveBurner": (0, 2),
            "DiningTable": (0, 1),
            "GarbageCan": (1, 1),
            "CoffeeMachine": (0, 1),
            "Shelf": (0, 1),
        },
        together=(("CounterTop", "CoffeeMachine"), ("CounterTop", "Drawer"), ("StoveBurner", "StoveBurner")),
        objects=(
            *("Apple", "Tomato", "Potato", "Egg", "Bread", "Lettuce", "Mug", "Cup", "Plate", "Bowl", "Pan", "Pot"),
            *("Fork", "Spoon", "Knife", "ButterKnife", "Spatula", "Ladle", "SaltShaker", "PepperShaker"),
            *("DishSponge", "SoapBottle", "Glassbottle", "WineBottle"),
        ),
        first_number=1,
    ),
    "living room": RoomKind(
        receptacles={
            "Sofa": (1, 1),
            "ArmChair": (1, 2),
            "CoffeeTable": (1, 1),
            "SideTable": (1, 2),
            "TVStand": (0, 1),
            "Shelf": (0, 2),
            "Drawer": (1, 3),
            "Cabinet": (0, 2),
            "DiningTable": (0, 1),
            "GarbageCan": (1, 1),
        },
        together=(("SideTable", "Drawer"), ("TVStand", "Drawer"), ("Shelf", "Shelf")),
        objects=(
            *("Book", "Newspaper", "RemoteControl", "Laptop", "CellPhone", "CreditCard", "KeyChain", "Pillow"),
            *("Box", "Vase", "Statue", "WateringCan", "TissueBox", "Watch", "Candle", "Plate"),
        ),
        first_number=201,
    ),
    "bedroom": RoomKind(
        receptacles={
            "Bed": (1, 1),
            "Desk": (1, 2),
            "Drawer": (2, 4),
            "Dresser": (0, 1),
            "Shelf": (1, 2),
            "SideTable": (1, 2),
            "ArmChair": (0, 1),
            "Safe": (0, 1),
            "GarbageCan": (1, 1),
        },
        together=(("Desk", "Drawer"), ("SideTable", "Drawer"), ("Dresser", "Drawer")),
        objects=(
            *("Book", "Pen", "Pencil", "CD", "CellPhone", "CreditCard", "KeyChain", "AlarmClock", "Mug", "Bowl"),
            *("Pillow", "Laptop", "BasketBall", "TennisRacket", "Vase", "Statue", "Watch"),
        ),
        first_number=301,
    ),
    "bathroom": RoomKind(
        receptacles={
            "SinkBasin": (1, 1),
            "CounterTop": (1, 1),
            "Cabinet": (1, 3),
            "Drawer": (1, 2),
            "Toilet": (1, 1),
            "BathtubBasin": (0, 1),
            "Shelf": (1, 2),
            "GarbageCan": (1, 1),
            "HandTowelHolder": (1, 1),
            "ToiletPaperHanger": (1, 1),
            "Cart": (0, 1),
        },
        together=(("CounterTop", "Drawer"), ("Toilet", "ToiletPaperHanger")),
        objects=(
            *("SoapBar", "SoapBottle", "SprayBottle", "ToiletPaper", "Cloth", "HandTowel", "Candle", "TissueBox"),
            *("DishSponge", "PaperTowel", "Plunger"),
        ),
        first_number=401,
    ),
}


@dataclass(frozen=True)
class Layout:
    """One room without its objects."""

    kind: str
    number: int
    """As in ALFRED: kitchens from 1, living rooms from 201, bedrooms from 301, bathrooms from 401."""
    receptacles: tuple[tuple[str, int, int], ...]
    """Kind, number within the kind, and place."""

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.receptacles}


def make_layout(kind: str, index: int) -> Layout:
    """Layout number `index` of a kind of room."""
    room = ROOM_KINDS[kind]
    rng = random.Random(f"layout/{kind}/{index}")
    counts = {name: rng.randint(low, high) for name, (low, high) in room.receptacles.items()}
    standing = [(name, number) for name, count in counts.items() for number in range(1, count + 1)]
    rng.shuffle(standing)
    places: dict[tuple[str, int], int] = {one: place for place, one in enumerate(standing, 1)}
    for host, guest in room.together:
        hosts = [one for one in standing if one[0] == host]
        guests = [one for one in standing if one[0] == guest and one not in hosts[:1]]
        if hosts and guests and rng.random() < 0.6:
            places[guests[0]] = places[hosts[0]]
    receptacles = tuple((name, number, places[name, number]) for name, number in sorted(standing))
    return Layout(kind, room.first_number + index, receptacles)

"""The tiny model and rows of the recipes' tests."""

from tests.recipes.conftest import world as world

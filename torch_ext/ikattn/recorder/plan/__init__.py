"""The plan: which modules are attention, which parts a block has, and which maps are asked for."""

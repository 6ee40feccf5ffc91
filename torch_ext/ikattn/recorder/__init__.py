"""How a model that runs is recorded: what to listen to, what an attention was given, its maps."""

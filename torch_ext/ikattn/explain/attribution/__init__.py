"""Attribution: the part that each token of the input has in a model's answer."""

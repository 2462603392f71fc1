"""The xpu device of Oarlock: Intel GPUs through torch.xpu."""

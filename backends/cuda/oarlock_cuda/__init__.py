"""The cuda device of Oarlock: NVIDIA GPUs through torch.cuda."""

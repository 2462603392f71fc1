"""The tpu device of Oarlock: Google TPUs through JAX."""

"""The neuron device of Oarlock: AWS Trainium through TorchNeuron."""

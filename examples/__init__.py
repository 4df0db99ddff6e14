"""Training scripts, run as they are. The benchmark imports the core of one of them (``examples.pretraining``)."""

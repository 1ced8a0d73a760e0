"""Around the training loop, whoever trains: the settings, the optimizer, the precision, the metrics, the evaluation."""

"""`static_graph=True`

torch averages nothing during the first backward pass. A node at the module's output, `_DDPSink`, asks autograd to average all
gradients when that pass is over. If the node is not where backward comes along, or comes along at the wrong time, nothing is
averaged, in this step and all that follow.
"""

"""The stages, for programs that write to, freeze, convert or hook what is sharded: each is followed, or refused by name.

model.py           the stages, with what happens before and after each pass and step, and ``with model.gathered():``
flat.py            the parameters of a unit: written to by users, used by no rank, not finite
parameters.py      a parameter that counts its writes, and one that has no gradient for users
refusals.py        what cannot be right on shards, with what to do instead: add yours there
initial_values.py  models on the meta device
"""

"""What everyone trains: the models, their initial values, the data and the objective.
A batch is a function of seed and step, an initial value one of seed and name, so that any rank can make
its part of either without the whole, and no layout can see other data than another. Frameworks differ in what they do
with these; that these are the same for all is what makes their runs comparable.

May import: spec.
"""

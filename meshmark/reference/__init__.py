"""Models, initial values, data and objective, which are the same for every framework.

A batch is a function of seed and step, and an initial value is a function of seed and name. Any rank can therefore
make its part of either without the whole, and no layout can see other data than another. Frameworks differ in what
they do with these inputs. Runs are comparable because the inputs are the same for all.

May import: spec.
"""

"""Reading a model: paths, containers, ties, and the layout that a state keeps of them."""

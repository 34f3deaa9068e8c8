"""The judge of `meshmark check`: what a recorded run did, held against one process in float64."""

"""The mathematics: update rules and parts for chains, written once, the array library unseen."""

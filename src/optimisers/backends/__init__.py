"""The arithmetic: how a program of rules runs on the arrays of one library, the rules unseen."""

"""What a step costs, measured: every number in the documentation comes out of here."""

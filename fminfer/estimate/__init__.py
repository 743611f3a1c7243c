"""What a run will take: check and a simulator compute nothing; bench and costs measure."""

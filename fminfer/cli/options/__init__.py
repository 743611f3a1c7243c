"""The options of the commands, and the groups in which help shows them."""

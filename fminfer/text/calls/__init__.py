"""Tool calls in the text of answers: the forms in which models write them."""

"""From a batch to new variables: the compiled update, its guard, the optimisers."""

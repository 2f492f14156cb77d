"""Does CLEAR keep what was learned? Its arms over seeds, scored, tabled and drawn."""

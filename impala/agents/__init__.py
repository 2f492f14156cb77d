"""The agent: torso, core and heads, the distributions of actions."""

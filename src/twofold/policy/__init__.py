"""Pure decisions: no state, no clock, no chance. The live system and the simulator share them."""

"""Pure decisions: no state, no clock, no chance. The live system and the simulator share them.

Each table holds one function per name, and each function only the views it is given:
`prefill.PREFILL_CHOICES` and `decode.DECODE_CHOICES` (which worker), `split.SPLIT_CHOICES` (two
legs or one), `admit.ADMISSIONS` (whether at all), `chunk.CHUNK_BUDGETS` (prompt tokens in a
step). `batch` is what every step keeps to.
"""

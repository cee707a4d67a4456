"""Every engine option, written once: its field carries type, default, range, choices and help.

Each file holds one group. `extra` of a field is read by the command line: `aliases` are other spellings of the flag;
`parse` is "human_int" (1k = 1000, 1K = 1024), "human_int_or_auto" (also "auto" and -1) or "json" (an object, whole or
by dotted keys); `value_optional` lets the flag stand alone, which means True; `otherwise` says what
there is instead of the choices that vLLM has and Quire lacks, and `refused` says it of single choices.
"""

"""The flight recorder: what an engine was asked, planned and got, for the time after a crash."""

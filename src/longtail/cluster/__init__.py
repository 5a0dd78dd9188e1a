"""Workers: what each of them does and when, which requests it gets, what idle ones are worth."""

"""Commands for people who look: inspect, replay, report, check, mig, sample."""

"""Programs that look closer: tune, check, inspect, replay. Nothing imports them."""

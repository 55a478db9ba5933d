"""Points24 and EZPoints: four cards (or two) and a formula."""

"""Points24, EZPoints, NumberLine and Blackjack, drawn with Pillow."""

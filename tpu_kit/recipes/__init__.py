"""What a user starts, each readable in one sitting.

Offers `sft.train`.
Must not be imported by the rooms that it uses.
"""

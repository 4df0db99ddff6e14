"""What a user holds: ``Engine``, its optimizer, and how both are made."""

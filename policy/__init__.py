"""What may cross a border, who may do what, and how fields are transformed."""

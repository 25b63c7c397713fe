"""What every service needs to talk to another: channels, tensors on the wire, the table of errors."""

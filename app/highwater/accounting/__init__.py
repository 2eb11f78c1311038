"""What a rank's memory is made of, and what follows from it. Pure: no I/O, no clock."""

"""What adapters are accepted from PEFT, how they are identified, and the packed file that travels. numpy only."""

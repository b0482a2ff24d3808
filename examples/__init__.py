"""A real base model and three trained adapters to try Loraplex with. No service imports anything from here."""

"""What a checkpoint holds of a session, and what replicas have alike."""

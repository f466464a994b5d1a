"""Part I: attention, exactly. Chapters 01 to 04."""

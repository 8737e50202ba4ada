"""What a person reads about each kind of answer; printing it is `output`'s business."""

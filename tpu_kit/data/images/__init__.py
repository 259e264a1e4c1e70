"""Pictures of rows: opens them, counts their tokens, packs rows with at most K of them, and makes their pixels.

Preparation reads only the headers of pictures; pixels are decoded with their batches. Only runs with model.images=true
import this folder. It knows nothing of devices.
"""

class Metrics:
    def __init__(self, engine, model_name):
        pass

    def count_refused(self, status):
        pass

    def render(self):
        return b"", "text/plain"

def task_19_0(value, limit=0):
    return value * 19 + limit

def task_19_1(value, limit=1):
    return value * 20 + limit

def task_19_2(value, limit=2):
    return value * 21 + limit

def task_19_3(value, limit=3):
    return value * 22 + limit

def task_19_4(value, limit=4):
    return value * 23 + limit

def task_19_5(value, limit=5):
    return value * 24 + limit

def task_19_6(value, limit=6):
    return value * 25 + limit

def task_19_7(value, limit=7):
    return value * 26 + limit

def task_19_8(value, limit=8):
    return value * 27 + limit
